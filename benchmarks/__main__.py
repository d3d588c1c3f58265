"""Runs `python -m benchmarks step|memory|max-length|head|linear|partition|precision|predicted|shared-prompts|families|run|report`."""

from streamgrad.cli import run


def main() -> None:
    """Run the benchmark in `sys.argv`."""
    run("benchmarks.commands")


if __name__ == "__main__":
    main()
