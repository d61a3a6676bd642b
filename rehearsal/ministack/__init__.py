"""MiniStack as the rehearsal needs it: everything that touches the emulator's internals.

It runs in ``.venv-aws``, where MiniStack is installed: the project's own environment lacks it on
purpose, since both pin different botocores. ``rehearsal.local_aws`` starts ``server`` as a child
process; nothing in the project's environment imports the modules in here.

    internals.py          the names of MiniStack's that are used, checked when it is imported
    server.py             the process: checks, ``install()``, MiniStack's own main
    install.py            every fix, in one call
    cloudformation/       resource types that it lacks, and fixes of those that it has
    ecs_runtime.py        ECS tasks as containers, with ecs_containers.py and ecs_records.py
    ecs_requests.py       what ECS refuses
    consistency.py        what has just changed, and does not show yet
    ecs_placing.py        hosts for tasks
    ecs_hosts.py          what hosts are: taken, drained and terminated; some lack their GPU
    step_functions.py     runTask.sync as on AWS
    events.py             log groups as targets of EventBridge rules
    fsx.py                file systems, their links with buckets, and exports, as records
    linked_roles.py       service-linked roles, by AWS's names
    lambda_logs.py        functions write into their own log group only
    log_filters.py        regular expressions in the filters of logs
    calls.py              which role calls what: written down, and refused without a right to it
    validation.py         what no service takes, by the models of botocore
    wire.py               a request's parameters, read from what was sent
    rights.py             whether the deployed policies allow a call
    switches.py           what the emulator is strict about
    lambda_modules/       what AWS gives Lambda functions, in Python and Node.js
"""
