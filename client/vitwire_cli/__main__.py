"""`python -m vitwire_cli`, by which a server starts its HTTP front end."""

from vitwire_cli import main

main()
