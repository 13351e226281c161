""""""

import pytest

from appliance.frame.protocol import restored_from

SSD = "3 of 4 blocks from the SSD in 5.0 ms: predicted 4.0 ms, computing them 9.0 ms; regret 0.0 ms"
DRAM = "10 of 10 blocks from DRAM in 1.0 ms: predicted 0.5 ms, computing them not known"


@pytest.mark.parametrize(
    ("reason", "tier"),
    [
        (SSD, "SSD"),
        (DRAM, "DRAM"),
        (f"{DRAM}; {SSD}; {SSD}", "DRAM and SSD"),
        (f"{SSD.replace('3 of 4', '0 of 4')}; {DRAM}", "DRAM"),
        (f"4 blocks not taken from DRAM: predicted 2.0 ms; {SSD}", "SSD"),
        (None, "SSD"),
    ],
)
def test_where_blocks_came_from_is_read_from_the_words_that_are_logged(reason, tier):
    assert restored_from(reason) == tier
