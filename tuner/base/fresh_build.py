"""setuptools' `build_py` in an empty folder: what a former build left is not packed again."""

from __future__ import annotations

import shutil

from setuptools.command.build_py import build_py


class FreshBuild(build_py):  # type: ignore[misc]
    """The command of `pyproject.toml`."""

    def run(self) -> None:
        """Copy the packages."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
