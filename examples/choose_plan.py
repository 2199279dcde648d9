"""The best ways to train GPT-2 XL on 16 H100: every legal plan is forecast, none is run."""

from itercast.compose.plan_search.open_search import open_search
from itercast.compose.plan_search.search import best_plans


def main() -> None:
    """Print the five fastest plans that fit into memory."""
    search, target = open_search(
        "gpt2-xl",
        "h100-sxm-80gb",
        gpus=16,
        node="dgx-h100",
        global_batch=128,  # samples per step over all GPUs
        seq=1024,
        dtype="bf16",
    )
    found = best_plans(search, 16, "time")
    print(f"{found.considered} plans considered, {found.simulated} simulated")
    for scored in found.best[:5]:
        report = search.report(scored.plan, target.bundle_name)
        print(
            f"{report.iteration_us / 1e3:8.1f} ms  {report.memory_bytes / 1e9:5.1f} GB  "
            f"{report.plan}"
        )


if __name__ == "__main__":
    main()
