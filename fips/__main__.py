"""`python -m fips`."""

from fips.cli.main import main

main()
