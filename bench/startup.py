"""Time of importing the package, printing help, and parsing a recipe.

python bench/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import save, table

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
WORK = {
    "import burnish": ["-c", "import burnish, sys; assert 'torch' not in sys.modules"],
    "burnish --help": ["-m", "burnish.cli.main", "--help"],
    "burnish train --dry-run": ["-m", "burnish.cli.main", "train", str(RECIPE), "--dry-run"],
    "python alone": ["-c", "pass"],
}


def main() -> None:
    rows = []
    for name, arguments in WORK.items():
        seconds = []
        for _ in range(7):
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
        rows.append({"work": name, "system": "burnish", "wall_s": statistics.median(seconds)})
    print(table(rows, ["work", "wall_s"]))
    print(f"saved {save('startup', rows)}")


if __name__ == "__main__":
    main()
