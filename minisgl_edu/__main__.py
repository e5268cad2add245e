from minisgl_edu.cli import main

if __name__ == "__main__": raise SystemExit(main())
