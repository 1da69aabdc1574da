import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fsdp_ranks.py")


@pytest.mark.distributed
def test_gradients_of_two_ranks_under_fsdp2_equal_those_of_one_process(tmp_path):
    """Every layout, head tied or not, resharded or not, a rank with nothing to score."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "rendezvous")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
