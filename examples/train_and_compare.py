"""Train a model of one op family on measured rows and compare it with simple baselines.

The rows are those of this repository's `datasets/`; yours come from `itercast collect`. Errors are
on shapes that training never saw.
"""

import tempfile
from pathlib import Path

from itercast.learners.train import train

DATA = Path(__file__).parents[1] / "datasets"


def main() -> None:
    """Print the median error of each learner beside the noise of the measurement itself."""
    with tempfile.TemporaryDirectory() as folder:
        report = train([DATA], Path(folder) / "bundle", ["reduction"])
    for family, found in report.families.items():
        print(f"{family}, {found.rows} rows; measured twice: {found.retest_ape_pct:.1f} % apart")
        for learner, errors in found.learners.items():
            print(
                f"  {learner:>8}: median {errors['median_ape_pct']:5.1f} %, "
                f"bias {errors['bias_pct']:+.1f} %"
            )


if __name__ == "__main__":
    main()
