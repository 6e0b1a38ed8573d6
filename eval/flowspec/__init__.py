"""The FlowSpec paper's tables (arXiv 2507.02620, version 3) beside those of this project."""
