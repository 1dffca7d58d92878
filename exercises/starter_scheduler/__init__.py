"""An engine without a scheduler: write one. See docs/build_it_yourself.md."""
