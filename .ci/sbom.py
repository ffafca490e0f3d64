"""List the parts of a wheel: ``python .ci/sbom.py WHEEL PYTHON``. It writes ``WHEEL.cdx.json`` (CycloneDX 1.6).

PYTHON is that of an environment in which the wheel is installed with what it needs, and nothing else. The list has the
hash of the wheel, and of each part the name, the version and the license. The same wheel and the same versions give the
same bytes: there is no time, no number and no path in it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def sbom(wheel: Path, python: Path) -> Path:
    """Write the list beside the wheel, and return its path."""
    options = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--output-reproducible"]
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        *options,
        "--sv",
        "1.6",
        "--of",
        "JSON",
        str(python),
    ]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    name, version = wheel.name.split("-")[:2]
    root = listed["metadata"]["component"]
    if (root["name"].replace("-", "_"), root["version"]) != (name, version):
        raise SystemExit(f"{wheel.name} is not {root['name']} {root['version']}. Try: build it from this commit.")
    root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    made = wheel.with_name(f"{wheel.name}.cdx.json")
    made.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return made


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("Usage: python .ci/sbom.py WHEEL PYTHON")
    print(sbom(Path(sys.argv[1]), Path(sys.argv[2])))
