"""MuJoCo robots with tasks: cheetahs, ants, a humanoid, and walkers with random bodies.

Positions of bodies are those of MuJoCo's last forward pass, as in the originals. The time limits
are those of the registrations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import mujoco
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.mujoco import MujocoEnv

from envfleet.meta.tasks import Task, TaskEnv, TaskList, draw_uniform

Array = npt.NDArray[np.float64]
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


def _metadata(fps: int) -> dict[str, Any]:
    modes = ["human", "rgb_array", "depth_array", "rgbd_tuple"]
    return {"render_modes": modes, "render_fps": fps}


class Robot(TaskEnv, MujocoEnv):
    """What the robots share; subclasses give model, observation and reward."""

    model_file: ClassVar[str]
    frame_skip_: ClassVar[int] = 5
    start_noise: ClassVar[tuple[float, float]]
    """Uniform noise of the first positions, and noise of the first velocities."""
    has_normal_velocities: ClassVar[bool] = True
    """The noise of velocities is normal; else uniform too."""

    def __init__(self, *, render_mode: str | None = None, **task_args: Any) -> None:
        """`task_args` are those of `TaskList`."""
        MujocoEnv.__init__(self, self.model_file, self.frame_skip_, None, render_mode)
        self.use_tasks(self._task_list(task_args))
        size = self._observe().size
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        raise NotImplementedError

    def _observe(self) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    def _begin(self) -> npt.NDArray[np.float32]:
        first: npt.NDArray[np.float32] = MujocoEnv.reset(self)[0]
        return first

    def reset_model(self) -> Any:
        """Start at the model's own position, with some noise."""
        model, (at, speed) = self.model, self.start_noise
        qpos = self.init_qpos + self.np_random.uniform(-at, at, model.nq)
        if self.has_normal_velocities:
            qvel = self.init_qvel + speed * self.np_random.standard_normal(model.nv)
        else:
            qvel = self.init_qvel + self.np_random.uniform(-speed, speed, model.nv)
        self.set_state(qpos, qvel)  # type: ignore[no-untyped-call]
        return self._observe()


def _flat(*parts: Any) -> npt.NDArray[np.float32]:
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)


def _square_sum(values: Any) -> float:
    return float(np.square(values).sum())


# ---- half cheetahs ------------------------------------------------------------------------------


class _Cheetah(Robot):
    metadata = _metadata(20)
    model_file = "half_cheetah.xml"
    start_noise = (0.1, 0.1)

    def _observe(self) -> npt.NDArray[np.float32]:
        return _flat(self.data.qpos[1:], self.data.qvel, self.data.body("torso").xpos)

    def step(self, action: Any) -> StepResult:
        """Run; the episode never ends by itself."""
        before = self.data.qpos[0]
        self.do_simulation(action, self.frame_skip)
        speed = float((self.data.qpos[0] - before) / self.dt)
        reward = self._speed_reward(speed) - 0.05 * _square_sum(action)
        return self._observe(), reward, False, False, {}

    def _speed_reward(self, speed: float) -> float:
        raise NotImplementedError


class HalfCheetahVel(_Cheetah):
    """Run at the speed of the task."""

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        return TaskList(partial(draw_uniform, 0.0, 3.0, 1), **task_args)

    def _speed_reward(self, speed: float) -> float:
        return -abs(speed - float(self.task[0]))


class HalfCheetahDir(_Cheetah):
    """Run forwards (task 1) or backwards (task -1)."""

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        directions = [(-1.0,), (1.0,)]
        return TaskList(choices=directions, **task_args)

    def _speed_reward(self, speed: float) -> float:
        return float(self.task[0]) * speed


# ---- ants ---------------------------------------------------------------------------------------


class _Ant(Robot):
    metadata = _metadata(20)
    model_file = "ant.xml"
    start_noise = (0.1, 0.1)

    def __init__(self, *, contact_cost_weight: float = 5e-4, **kwargs: Any) -> None:
        """`contact_cost_weight=0` gives the rewards of mujoco-py 2, where contact forces were 0."""
        self._contact_cost_weight = contact_cost_weight
        super().__init__(**kwargs)

    def _contact_cost(self) -> float:
        return self._contact_cost_weight * _square_sum(np.clip(self.data.cfrc_ext, -1, 1))

    def _torso_xy(self) -> Array:
        return np.array(self.data.body("torso").xpos[:2])


class AntDir(_Ant):
    """Run in the direction of the task, an angle."""

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        tasks = TaskList(partial(draw_uniform, 0.0, 2 * np.pi, 1), **task_args)
        if tasks.num_tasks is not None:
            return tasks
        angles = [(-1.0,), (1.0,)]  # radians: not opposite, as in the original
        return TaskList(choices=angles, **task_args)

    def _observe(self) -> npt.NDArray[np.float32]:
        return _flat(self.data.qpos[2:], self.data.qvel)

    def step(self, action: Any) -> StepResult:
        """Run; the episode ends when the torso is too low or too high."""
        before, angle = self._torso_xy(), float(self.task[0])
        self.do_simulation(action, self.frame_skip)
        velocity = (self._torso_xy() - before) / self.dt
        forward = float(velocity @ (np.cos(angle), np.sin(angle)))
        reward = forward - 0.5 * _square_sum(action) - self._contact_cost() + 1.0
        is_healthy = np.isfinite(self.state_vector()).all() and 0.2 <= self.data.qpos[2] <= 1.0
        return self._observe(), reward, not is_healthy, False, {}


class AntGoal(_Ant):
    """Run to the point of the task."""

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        return TaskList(_in_circle, **task_args)

    def _observe(self) -> npt.NDArray[np.float32]:
        return _flat(self.data.qpos, self.data.qvel, np.clip(self.data.cfrc_ext, -1, 1))

    def step(self, action: Any) -> StepResult:
        """Run; the episode never ends by itself."""
        self.do_simulation(action, self.frame_skip)
        distance = float(np.abs(self._torso_xy() - self.task).sum())
        reward = -distance - 0.1 * _square_sum(action) - self._contact_cost()
        return self._observe(), reward, False, False, {}


def _in_circle(rng: np.random.Generator) -> npt.ArrayLike:
    angle, radius = rng.uniform(0.0, 2 * np.pi), 3.0 * np.sqrt(rng.uniform())
    return radius * np.cos(angle), radius * np.sin(angle)


# ---- the humanoid -------------------------------------------------------------------------------


class HumanoidDir(Robot):
    """Walk in the direction of the task, an angle."""

    metadata = _metadata(67)
    model_file = "humanoid.xml"
    start_noise = (0.01, 0.01)
    has_normal_velocities = False

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        return TaskList(partial(draw_uniform, 0.0, 2 * np.pi, 1), **task_args)

    def get_current_task(self) -> Task:
        """The direction as a unit vector."""
        angle = float(self.task[0])
        return np.array([np.cos(angle), np.sin(angle)])

    def _observe(self) -> npt.NDArray[np.float32]:
        data = self.data
        return _flat(
            data.qpos[2:], data.qvel, data.cinert, data.cvel, data.qfrc_actuator, data.cfrc_ext
        )

    def _centre_xy(self) -> Array:
        mass = self.model.body_mass
        centre: Array = (mass @ self.data.xipos)[:2] / mass.sum()
        return centre

    def step(self, action: Any) -> StepResult:
        """Walk; the episode ends when the pelvis is too low or too high."""
        before = self._centre_xy()
        self.do_simulation(action, self.frame_skip)
        moved = float((self._centre_xy() - before) @ self.get_current_task())
        data = self.data
        impact = min(0.5e-6 * _square_sum(data.cfrc_ext), 10.0)
        forward = 0.25 * moved / self.model.opt.timestep
        reward = forward - 0.1 * _square_sum(data.ctrl) - impact + 5.0
        return self._observe(), reward, not 1.0 <= data.qpos[2] <= 2.0, False, {}


# ---- random bodies ------------------------------------------------------------------------------

_FACTORS = {"body_mass": 1.5, "body_inertia": 1.5, "dof_damping": 1.3, "geom_friction": 1.5}
"""Each number of these arrays of a model is multiplied by the factor to the power of U(-3, 3)."""


def _scaled(values: Array, factors: Array, rng: np.random.Generator) -> Array:
    scaled: Array = values * factors ** rng.uniform(-3.0, 3.0, len(values))
    return scaled


class _RandParams(Robot):
    metadata = _metadata(62)
    frame_skip_ = 4
    start_noise = (0.005, 0.005)
    has_normal_velocities = False

    def _initialize_simulation(self) -> tuple[Any, Any]:
        model, data = super()._initialize_simulation()
        model.opt.timestep = 0.004  # as in the original; Gymnasium's model has 0.002
        return model, data

    def _task_list(self, task_args: dict[str, Any]) -> TaskList:
        own = [getattr(self.model, name).ravel() for name in _FACTORS]
        factors = np.repeat(list(_FACTORS.values()), [len(values) for values in own])
        values = np.concatenate(own)
        return TaskList(partial(_scaled, values, factors), **task_args)

    def reset_task(self, task: Any = None) -> None:
        """Give the model the masses, inertias, dampings and frictions of the task."""
        super().reset_task(task)
        rest = self.task
        for name in _FACTORS:
            values = getattr(self.model, name)
            values[:] = rest[: values.size].reshape(values.shape)
            rest = rest[values.size :]
        mujoco.mj_setConst(self.model, mujoco.MjData(self.model))

    def _observe(self) -> npt.NDArray[np.float32]:
        return _flat(self.data.qpos[1:], np.clip(self.data.qvel, -10, 10))

    def step(self, action: Any) -> StepResult:
        """Run forwards; the episode ends with a fall."""
        before = self.data.qpos[0]
        self.do_simulation(action, self.frame_skip)
        speed = float((self.data.qpos[0] - before) / self.dt)
        reward = speed + 1.0 - 1e-3 * _square_sum(action)
        return self._observe(), reward, not self._is_up(), False, {}

    def _is_up(self) -> bool:
        raise NotImplementedError


class Walker2DRandParams(_RandParams):
    """A walker with random masses, inertias, dampings and frictions."""

    model_file = "walker2d.xml"

    def _is_up(self) -> bool:
        _, height, angle = self.data.qpos[:3]
        return bool(0.8 < height < 2.0 and -1.0 < angle < 1.0)


class HopperRandParams(_RandParams):
    """A hopper with random masses, inertias, dampings and frictions."""

    model_file = "hopper.xml"

    def _is_up(self) -> bool:
        _, height, angle = self.data.qpos[:3]
        is_sane = (np.abs(self.state_vector()[2:]) < 100).all()  # NaN and infinity are not
        return bool(is_sane and height > 0.7 and abs(angle) < 0.2)
