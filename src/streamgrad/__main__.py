"""`python -m streamgrad`: the command line."""

from streamgrad.cli import main

if __name__ == "__main__":
    main()
