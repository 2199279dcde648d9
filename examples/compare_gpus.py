"""Which GPU trains BERT-large fastest, and where does its time go?"""

from itercast.api import capture, predict

GPUS = ("v100-sxm-32gb", "a100-sxm-80gb", "l40s", "h100-sxm-80gb", "b200-sxm")


def main() -> None:
    """Print a row per GPU: time, interval, memory, the two largest families of ops."""
    step = capture("bert-large", batch=8, seq=512, dtype="fp16")
    for gpu in GPUS:
        found = predict(step, gpu=gpu)
        low, high = found.iteration_us_p10 / 1e3, found.iteration_us_p90 / 1e3
        largest = list(found.by_family_us.items())[:2]
        parts = ", ".join(f"{name} {us / 1e3:.0f} ms" for name, us in largest)
        fits = "" if found.fits else "  does not fit"
        print(
            f"{gpu:>14}: {found.iteration_us / 1e3:6.1f} ms (80 % within {low:.1f} to {high:.1f}); "
            f"{parts}{fits}"
        )


if __name__ == "__main__":
    main()
