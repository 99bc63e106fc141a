"""A count of changes of values that all ranks must have in common: options, dtypes, the set of trainable parameters.

`ModelAgreement` looks at it in every forward, which costs one comparison, and compares the ranks again if it has grown.
A change that is noted though nothing differs afterwards costs this rank a look at its own model, and no communication.
"""

from __future__ import annotations


class ModelChanges:
    """The count of changes in the models of this process."""

    count = 0

    def note(self) -> None:
        """Let every model be described again in its next forward."""
        self.count += 1


CHANGES = ModelChanges()
