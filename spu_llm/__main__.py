"""`python -m spu_llm`."""

from spu_llm.app.cli import main

if __name__ == "__main__":
    main()
