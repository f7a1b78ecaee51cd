"""A self-contained HTML document: the head that all pages have, around the body of one."""

from html import escape
from importlib.resources import files
from string import Template

_HERE = __package__


def html_document(title: str, style: str, body: str, color_scheme: str = "light", *, connects: bool = False) -> str:
    """The text of a document that loads nothing from elsewhere.

    Args:
        title: plain text; it is escaped here.
        style: CSS.
        body: HTML inside the body element.
        color_scheme: the color schemes that the style supports, as in CSS.
        connects: whether its scripts may send requests to the server that it came from.
    """
    return Template(read_template(_HERE, "document.html")).substitute(
        title=escape(title),
        style=style,
        body=body,
        color_scheme=color_scheme,
        connects="; connect-src 'self'" if connects else "",
    )


def read_template(package: str | None, name: str) -> str:
    """The text of a template, style or script of a package.

    Args:
        package: the package, as in ``__package__``; its folder ``assets`` has the file.
        name: of the file.
    """
    assert package is not None
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")
