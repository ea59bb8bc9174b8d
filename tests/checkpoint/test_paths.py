"""Where a run's folder lies in `outputs`."""

from pathlib import Path

import pytest

from lockstep.checkpoint import paths


@pytest.mark.parametrize("place", ["cnn_digits/2026-01-02", "cnn_digits/sweeps/2026-01-02/3"])
def test_a_machine_without_the_folder_puts_it_at_the_same_place(place: str) -> None:
    checkpoint = paths.last(Path("/there/outputs", place))
    assert paths.place_in_outputs(paths.run_of(checkpoint)) == Path(place)
