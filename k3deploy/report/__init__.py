"""Reports of a verdict: ``report.html`` (one file), the terminal, Markdown."""

from k3deploy.report.html import write_html

__all__ = ["write_html"]
