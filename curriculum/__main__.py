"""`python -m curriculum` is the `curriculum` command."""

from curriculum.cli.main import main

main()
