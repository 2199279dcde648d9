"""Time of single ops on a GPU: a table of matrix products goes in, microseconds come out."""

import pandas as pd

from itercast.learners.known_bundles import find_bundle, find_gpu

GPU = "a100-sxm-80gb"


def main() -> None:
    """Price square products in bf16 and print what share of the peak they reach."""
    _, bundle = find_bundle(GPU)
    gpu = find_gpu(GPU, bundle)
    sizes = [256, 1024, 4096, 8192]
    rows = pd.DataFrame(
        {"gpu": GPU, "op": "mm", "m": sizes, "n": sizes, "k": sizes, "dtype": "bf16"}
    )
    priced = bundle.price("gemm", rows)
    for size, time_us in zip(sizes, priced["predicted_us"], strict=True):
        share = 2 * size**3 / (time_us * 1e-6) / gpu.peak("bf16")
        print(f"{size:>5}^3: {time_us:9.1f} us, {100 * share:4.0f} % of the peak")


if __name__ == "__main__":
    main()
