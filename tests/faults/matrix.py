"""Faults of the support matrix: cells that are greener than their evidence."""

from fault import Fault

_RECORDS = "tests/support_matrix/test_records.py"
_PAGES = "tests/support_matrix/test_pages.py"

FAULTS = (
    Fault(
        name="simulated-counts-as-verified",
        file="support_matrix/srv_matrix/records.py",
        text="return self >= Level.E4",
        planted="return self >= Level.E3",
        effect="Cells that ran only on a simulated device are shown as verified.",
        tests=(f"{_PAGES}::test_only_what_was_run_on_the_device_is_green",),
    ),
    Fault(
        name="failed-test-lifts-a-cell",
        file="support_matrix/srv_matrix/records.py",
        text="[line.level for line in self.evidence if line.passed]",
        planted="[line.level for line in self.evidence]",
        effect="A cell is green although its test failed.",
        tests=(f"{_RECORDS}::test_failed_test_raises_no_level",),
    ),
    Fault(
        name="cell-prints-the-better-fact",
        file="support_matrix/srv_matrix/records.py",
        text="return min(one, other, key=_RANK.__getitem__)",
        planted="return max(one, other, key=_RANK.__getitem__)",
        effect="An argument is shown as supported that core does not implement.",
        tests=(f"{_RECORDS}::test_a_cell_prints_the_lower_of_its_two_facts",),
    ),
    Fault(
        name="forced-path-counts-as-the-device",
        file="support_matrix/srv_matrix/records.py",
        text="return self.machine != self.variant",
        planted="return False",
        effect="A test that ran on a newer card is shown as run on the older one.",
        tests=(f"{_PAGES}::test_a_forced_path_is_shown_as_run_with_a_note_and_counted_apart",),
    ),
)
