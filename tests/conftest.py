"""Settings that all tests share."""

from hypothesis import settings

# No deadline: a busy machine is no failure. The parent is Hypothesis' own profile, which in CI is
# the reproducible one.
settings.register_profile("sparcel", parent=settings(), deadline=None)
settings.load_profile("sparcel")
