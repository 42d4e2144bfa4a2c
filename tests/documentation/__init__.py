"""The documentation site: `python -m tests.documentation` builds it into build/site."""
