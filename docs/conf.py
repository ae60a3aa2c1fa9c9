"""How Sphinx builds the site; `make docs` runs it."""

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).with_name("extensions")))

project = "sparcel"
author = "the sparcel authors"
copyright = f"2026, {author}"
release = version = version_of("sparcel")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "from_code",
    "whole_links",
]
exclude_patterns = ["extensions"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# A name in single backticks is a reference, and one that leads nowhere an error. Types in
# signatures are not: inner classes have no page.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:(obj|exc)", r"(?!sparcel\b).*|.*\.T")]
suppress_warnings = ["ref.python"]  # `bytes` is Python's, and not an attribute of that name

smartquotes = False  # they would turn the dashes of options

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["nemo_rl", "skyrl", "verl", "vllm"]
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "sparcel"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"


def _name_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Show the name of a file above its code, where a comment gives it."""
    source[0] = re.sub(
        r"^<!-- file: (\S+) -->\n```(\w+)\n",
        r"```{code-block} \2\n:caption: \1\n",
        source[0],
        flags=re.MULTILINE,
    )


def setup(app: Sphinx) -> None:
    """Let this file take part in the build."""
    app.connect("source-read", _name_files)
