"""Publishes a compressed checkpoint on the Hub, and loads it back from there.

    python examples/push.py FOLDER OWNER/NAME

FOLDER was written by `fips compress`. The token comes from `hf auth login` or HF_TOKEN.
"""

import argparse
import sys

from fips import FipsError, PushConfig, load, push
from fips.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish a compressed checkpoint.")
    parser.add_argument("folder", help="Folder written by fips compress.")
    parser.add_argument("repo_id", help="owner/name; the repository is made when it is missing.")
    parser.add_argument("--public", action="store_true", help="Let everybody read it.")
    args = parser.parse_args()
    try:
        planned = push(args.folder, args.repo_id, dry_run=True)
        print(f"{len(planned.files)} files, {planned.bytes:,} bytes")
        config = PushConfig(public=args.public, commit_message="Add the compressed model")
        result = push(args.folder, args.repo_id, config, progress=Progress())
        print(result.table())
        model = load(args.repo_id, revision=result.commit)
    except FipsError as error:
        sys.exit(f"Error: {error}")
    print(f"loaded {type(model).__name__} from {result.url}")


if __name__ == "__main__":
    main()
