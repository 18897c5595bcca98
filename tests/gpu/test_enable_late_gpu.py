"""`tuner.enable` on a machine whose dispatcher is not built yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import ran

from tuner.base.processes import python_command, python_environment

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch, tuner
from tuner.runtime.call import dispatch
attend = torch.nn.functional.scaled_dot_product_attention
tensors = [torch.randn(1, 2, 256, 64, device="cuda").half() for _ in range(3)]
table = lambda: torch._C._dispatch_dump_table("aten::scaled_dot_product_attention")
before = table()
tuner.enable()
assert table() == before
attend(*tensors)
assert tuner.stats().calls == 0, "PyTorch's own call"
while dispatch._thread.is_alive():  # the main thread goes on, and takes it up
    dispatch._thread.join(0.1)
assert dispatch.is_loaded() and table() != before
attend(*tensors)
assert tuner.stats().calls == 1
tuner.disable()
assert table() == before
"""


@pytest.mark.compile
def test_operators_are_overridden_once_the_dispatcher_is_built(tmp_path: Path) -> None:
    environment = {**python_environment(), "TUNER_CACHE_DIR": str(tmp_path)}
    ran(*python_command("-c", PROGRAM), env=environment, timeout=300)
