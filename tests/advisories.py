"""Known vulnerabilities of the versions that requirements.lock pins, by pip-audit and the open database OSV.

`python tests/advisories.py`, as .ci/run does, fails where a pin has an advisory that is not accepted below.
Where pip-audit or the database cannot be reached, the last line says that nothing was checked.
"""

import json
import sys
import tempfile
from pathlib import Path

import releases

TOOL = ("pip-audit==2.10.1",)
DATABASE = "https://api.osv.dev/v1/query"
ACCEPTED: dict[str, str] = {}  # an advisory's number -> why it does not concern this suite
LOCK = releases.ROOT / "requirements.lock"


def advisories(lock: Path = LOCK, database: str = DATABASE) -> dict[str, list[str]]:
    """The advisories of each pin that has any: `name version` -> their numbers. Raises RuntimeError where the
    database gives no answer."""
    folder = releases.installed(TOOL, dependencies=True)
    with tempfile.TemporaryDirectory() as out:
        report = Path(out) / "report.json"
        command = [
            "-m",
            "pip_audit",
            "--requirement",
            str(lock),
            "--no-deps",
            "--disable-pip",
            "--progress-spinner",
            "off",
        ]
        command += [
            "--vulnerability-service",
            "osv",
            "--osv-url",
            database,
            "--format",
            "json",
            "--output",
            str(report),
        ]
        said = releases.python(folder, *command).stderr.strip().splitlines()
        if not report.is_file():
            raise RuntimeError(f"pip-audit has no answer of {database}: {(said or ['no message'])[-1]}")
        pins = json.loads(report.read_text())["dependencies"]
    found = {
        f"{pin['name']} {pin['version']}": [one["id"] for one in pin["vulns"]]
        for pin in pins
        if pin.get("vulns")
    }
    return {pin: numbers for pin, numbers in found.items() if numbers}


def main(lock: Path = LOCK, database: str = DATABASE) -> int:
    """Print what was found; 1 where an advisory is not accepted."""
    try:
        found = advisories(lock, database)
    except RuntimeError as error:
        print(f"advisories: NOT CHECKED: {error}")
        return 0
    open_ones = {pin: [n for n in numbers if n not in ACCEPTED] for pin, numbers in found.items()}
    open_ones = {pin: numbers for pin, numbers in open_ones.items() if numbers}
    for pin, numbers in open_ones.items():
        print(
            f"advisories: {pin}: {', '.join(numbers)}; possible: a newer version (`make lock`), or a reason"
            " in tests/advisories.py"
        )
    print(
        f"advisories: {sum(map(len, open_ones.values()))} that are not accepted, of {LOCK.name} in {database}"
    )
    return int(bool(open_ones))


if __name__ == "__main__":
    sys.exit(main())
