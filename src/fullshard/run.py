"""Let `python -m fullshard.run` run a program with fullshard in the place of torch's FSDP."""

import sys

from fullshard.drop_in.program import main

if __name__ == "__main__":
    main(sys.argv[1:], "python -m fullshard.run")
