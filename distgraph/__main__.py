"""`python -m distgraph` is the command line."""

from distgraph.command import main

if __name__ == "__main__":
    main()
