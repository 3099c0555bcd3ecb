"""``python -m jaxsched`` is the command line."""

from jaxsched.cli import main

if __name__ == "__main__":
    main()
