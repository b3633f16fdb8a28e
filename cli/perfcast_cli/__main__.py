"""``python -m perfcast_cli``."""

from perfcast_cli.main import main

main()
