"""Train with four learning rates on two nodes, two at a time, and print what each has reached.

python examples/sweep.py; the same again takes the results that are there.
"""

from trainctl import submit

RATES = "lr=0.0005,0.001,0.002,0.004"
job = submit("ddp", "--preset", "digits", run="rates", nodes=2, vary=[RATES], max_hours=1)
job.wait()
for trial in job.trials():
    print(trial)
