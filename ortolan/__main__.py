"""`python -m ortolan`: the same as the command `ortolan`."""

from ortolan.cli import main

if __name__ == "__main__":
    main()
