"""Let `python -m fullshard` be the `fullshard` command."""

from fullshard.programs.cli import main

# Guarded because starting ranks imports this file again in every one of them.
if __name__ == "__main__":
    main()
