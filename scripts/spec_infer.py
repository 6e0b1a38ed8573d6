"""Run SpecInfer's two programs; called by spec_infer.sh and incr_decoding.sh."""
import sys

from eval.specinfer.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
