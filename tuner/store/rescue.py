"""Rescue of the contents of a lost SQLite file, which its open connection can still read."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from tuner.base import output
from tuner.errors import StoreError
from tuner.store.engine import OpenFile
from tuner.store.exchange import to_text
from tuner.store.faults import FAULTS


class Rescue:
    """JSON file beside a lost store, for `tuner store import`. Thread-safe.

    Args:
        file: file of the store.
    """

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self._name = f"{file.path.name}.rescued-{os.urandom(4).hex()}.json"
        self._lock = threading.Lock()
        self._said = ""

    def keep(self, read: Callable[[], Mapping[str, Any]], *, anew: bool) -> str:
        """Write the contents of the lost file. Returns a sentence that says where.

        Args:
            read: function that returns the contents as a document.
            anew: True to write again after a change.
        """
        with self._lock:
            if anew or not self._said:
                self._said = self._write(read)
            return self._said

    def _write(self, read: Callable[[], Mapping[str, Any]]) -> str:
        try:
            document = read()
            if not document["measurements"]:
                return "it held no measurements"
            text = to_text(document)
        except (StoreError, SQLAlchemyError, *FAULTS) as exc:
            return f"what it held cannot be read any more: {exc}"
        reason = ""
        for folder in (self.file.path.parent, Path(tempfile.gettempdir())):
            path = folder / self._name
            try:
                output.write(path, text)
            except StoreError as exc:
                reason = str(exc)
                continue
            return f"what it held, the last results too, is in {path} (`tuner store import`)"
        return f"what it held is lost: {reason}"
