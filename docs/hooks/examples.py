"""For the API pages: the examples of docstrings as code.

In Google's style `Example:` begins a note, in which `>>>` is a quotation; only `Examples:` is known to hold code.
"""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads `Example:` as `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every object with a docstring or without."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
