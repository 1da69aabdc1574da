"""`python -m lit_align`, the same as `lit-align`."""

from lit_align.cli import main

if __name__ == "__main__":
    main()
