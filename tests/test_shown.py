"""What others wrote is shown in messages without secrets, escapes and ends of lines."""

from __future__ import annotations

from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from sparcel.errors import few, public_url, shown

TEXTS = st.text(st.characters(), max_size=300)
PARTS = st.text("abcXYZ019-._", min_size=6, max_size=12)
SECRETS = (st.text("gh/+=:%", max_size=9) | st.text("gh@+=:%", max_size=9)).map("SECRET{}".format)


@given(TEXTS)
def test_shown_text_is_short_printable_and_stays_as_it_is(text: str) -> None:
    found = shown(text)
    assert found.isprintable()
    assert len(found) <= 200
    assert shown(found) == found
    if text.isprintable() and len(text) <= 200:
        assert found == text


@given(st.lists(TEXTS, max_size=9))
def test_of_many_names_few_are_shown(names: list[str]) -> None:
    assert few(names) == [shown(name) for name in names[:3]]


@given(PARTS, PARTS, SECRETS, st.sampled_from(["http", "s3", "tcp", "simplecache::https"]), PARTS)
def test_urls_lose_what_is_secret(
    host: str, user: str, secret: str, scheme: str, path: str
) -> None:
    """A password with slashes, as keys of object stores have, and one that is escaped."""
    public = f"{scheme}://{host}:80/{path}/x"
    coded = quote(secret, safe="")
    for login in ("", f"{user}:{secret}@", f"{user}:{coded}@", f"{coded}@"):
        for end in ("", f"?X-Signature={secret}", f"#{secret}", f"?a={secret}#{secret}"):
            assert public_url(f"{scheme}://{login}{host}:80/{path}/x{end}") == public
    for plain in (
        public,
        f"{scheme}://{host}/{path}@main/x",
        f"{scheme}://[::1]:80/{path}",
        path,
        f"./{path}?{path}@{user}:x",
    ):
        assert public_url(plain) == plain
