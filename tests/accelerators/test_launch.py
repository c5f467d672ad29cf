import pytest

from accelerators.launch import Launch, read_launch

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.promise("X10")
@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch()),
        (TORCHRUN, Launch(rank=5, world_size=8, local_rank=1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch()),
        ({"WORLD_SIZE": "1"}, Launch()),
        ({"RANK": "", "WORLD_SIZE": " "}, Launch()),
        ({"LOCAL_RANK": "0"}, Launch(local_rank=0)),
        # torchrun in each of a scheduler's tasks: what torchrun said counts
        ({**TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, Launch(5, 8, 1)),
        # one task, or a shell inside an allocation of several, is no launch
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Launch()),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, Launch()),
    ],
)
def test_a_launch_without_contradiction_is_taken_as_it_is(environment, launch):
    assert read_launch(environment) == launch


@pytest.mark.promise("X10")
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "4"}, "Cannot use WORLD_SIZE=4: RANK is not set. Set both"),
        ({"RANK": "0"}, "Cannot use RANK=0: WORLD_SIZE is not set. Set both"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "Cannot use RANK=4: WORLD_SIZE is 4. Set it to 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "Cannot use RANK=0: WORLD_SIZE is 0"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "Cannot use LOCAL_RANK=4: LOCAL_WORLD_SIZE is 4"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "Cannot use LOCAL_RANK=2: WORLD_SIZE is 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "Cannot use RANK=one: it takes a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "SLURM started 4 tasks (SLURM_STEP_NUM_TASKS), and RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI started 2 tasks"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "set RANK=$PMI_RANK and WORLD_SIZE=$PMI_SIZE"),
    ],
)
def test_a_contradiction_is_an_error_and_never_many_ranks_training_alone(environment, message):
    with pytest.raises(ValueError) as error:
        read_launch(environment)
    assert message in str(error.value)


@pytest.mark.promise("X10")
def test_a_group_of_one_rank_in_a_launch_of_several_is_an_error():
    read_launch(TORCHRUN).check_group(8)
    read_launch({}).check_group(2)  # a program that starts its own ranks, and needs no launcher's variables
    with pytest.raises(ValueError, match=r"8 ranks were started, and the process group has 1, .*\. Initialise"):
        read_launch(TORCHRUN).check_group(1)
