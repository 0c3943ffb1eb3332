"""`python -m accord` is `accord`: for `torchrun … -m accord sft …`, and for the workers that Accord starts itself."""

from accord.cli import main

main()
