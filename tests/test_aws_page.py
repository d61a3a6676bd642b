"""docs/aws.md names a module and a test, or a page, for each behavior of AWS; all of them exist."""

import re

from tests.conftest import ROOT


def test_every_row_names_a_module_and_a_test_that_exist() -> None:
    rows = re.findall(r"(?m)^\| (A\d+[a-d]?) \|(.*)\|$", (ROOT / "docs" / "aws.md").read_text())
    assert len(rows) > 70
    missing = []
    for name, row in rows:
        _, source, module, shown = (cell.strip() for cell in row.split("|"))
        if not source or (module.startswith("`") and not (ROOT / module.strip("`")).is_file()):
            missing.append(f"{name}: {module}")
        file, _, test = shown.strip("`").partition("::")
        if (test and f"def {test}(" not in (ROOT / file).read_text()) or (
            not test and not re.fullmatch(r"\[\w+\.md\]\(\w+\.md(#[\w-]+)?\)", shown)
        ):
            missing.append(f"{name}: {shown}")
    assert missing == []
