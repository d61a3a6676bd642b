"""Adapters of MiniStack: everything that touches the emulator's internals.

It runs in ``.venv-aws``, where MiniStack is installed: the project's own environment lacks it on
purpose, since both pin different botocores. ``rehearsal.local_aws`` starts ``server`` as a child
process; nothing in the project's environment imports the modules in here.

    internals.py          MiniStack's modules, of the one version that this was written for
    server.py             the process: checks, ``install()``, MiniStack's own main
    install.py            every fix, in one call
    cloudformation.py     fixes of the resource types that it has
    resource_types.py     those of EC2 and ECS that it lacks
    ecs_runtime.py        ECS tasks as containers
    ecs_hosts.py          tasks, hosts and groups, which rehearsal.model moves
    step_functions.py     runTask.sync as on AWS
    logs.py               log groups: targets of rules, of functions, filters
    calls.py              which role calls what: written down, and refused without a right to it
    rights.py             whether the deployed policies allow a call
    validation.py         what no service takes, by the models of botocore
    lambda_modules/       what AWS gives Lambda functions, in Python and Node.js
"""
