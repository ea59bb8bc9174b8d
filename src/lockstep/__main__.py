"""Run a command of Lockstep without its script on PATH:  python -m lockstep parity devices=2"""

from lockstep.programs.main import main

if __name__ == "__main__":
    main()
