"""docs/aws.md names a module and a test, or a page, for each behavior of AWS; all of them exist."""

import re

from tests.conftest import ROOT


def test_every_row_names_a_module_and_a_test_that_exist() -> None:
    page = (ROOT / "docs" / "aws.md").read_text()
    rows = re.findall(r"(?m)^\* \*\*(A\d+[a-f]?)\*\*((?:.|\n  )*)", page)
    assert len(rows) > 70
    missing = []
    for name, row in rows:
        behavior, _, shown = " ".join(row.split()).rpartition("): ")
        module, _, test = shown.partition(", ")
        if "(" not in behavior or (
            module.startswith("`") and not (ROOT / module.strip("`")).is_file()
        ):
            missing.append(f"{name}: {module}")
        file, _, function = test.strip("`").partition("::")
        if (function and f"def {function}(" not in (ROOT / file).read_text()) or (
            not function and not re.fullmatch(r"\[\w+\.md\]\(\w+\.md(#[\w-]+)?\)", test)
        ):
            missing.append(f"{name}: {test}")
    assert missing == []
