"""Train a policy: `python train.py loss=simpo`, the same as `lit-align train loss=simpo`."""

from lit_align.cli import main

if __name__ == "__main__":
    main()
