//! Runs a workload on an engine and on the model in step.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_device::{
    BlockDevice, CrashDevice, CrashLog, CrashState, Fault, FaultDevice, MemoryDevice, RequestKind,
};

use super::manners::EngineManners;
use super::oracle::{DurablePromise, History};
use super::picture::{self, Picture, PictureId, ROOT};
use super::workload::{Runner, Workload, WorkloadOp, WorkloadStep, find};
use super::{MemberDevices, OpenedVolume, TestedEngine};
use crate::model::Model;

/// A volume on which the set-up of a workload has run.
pub(super) struct ReadyVolume {
    pub(super) devices: Vec<Arc<MemoryDevice>>,
    pub(super) model: Model,
    manners: EngineManners,
    /// The number of the next operation.
    next: u32,
}

/// A workload that was run, with the log of its writes.
pub(super) struct Recorded {
    pub(super) history: History,
    pub(super) log: CrashLog,
    /// How many writes and flushes each member received.
    pub(super) requests: Vec<[u64; 2]>,
}

/// The request to a member that fails with an error: the one that comes after `number` requests of
/// the same kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailingRequest {
    pub(super) member: usize,
    pub(super) requests: RequestKind,
    pub(super) number: u64,
}

/// How far the workload had come at the cut.
pub(super) struct WorkloadProgress {
    /// The indexes of the promises that were made.
    pub(super) kept: Vec<usize>,
    /// The moment after the last operation that had begun.
    pub(super) latest: usize,
}

impl ReadyVolume {
    /// Runs the set-up on a copy of the volume `image`. If dropping a volume writes, the power is
    /// cut behind every other set-up, so that opening the volume again is a recovery.
    pub(super) fn new(
        engine: &dyn TestedEngine,
        image: &[Arc<dyn BlockDevice>],
        workload: &Workload,
    ) -> Result<Self, String> {
        let devices = image.iter().map(|one| Arc::new(MemoryDevice::over(one.clone())));
        let devices: Vec<_> = devices.collect();
        let fs = engine.open_writable(as_devices(&devices)).map_err(|e| format!("set-up: {e}"))?;
        let root = fs.attr(fs.root()).map_err(|e| format!("set-up: {e}"))?;
        let manners = engine.manners();
        let model = Model::new(&root).with_manners(manners.model);
        let mut runners = [fs.runner(1), Runner::new(&model, 1).with_subvolumes(&model)];
        for op in &workload.setup {
            for runner in &mut runners {
                runner.run(op).map_err(|e| format!("set-up: {op}: {e}"))?;
            }
        }
        let next = runners[0].next();
        fs.sync().map_err(|e| format!("set-up: sync: {e}"))?;
        let is_cut = manners.ends_with_writes && !workload.setup.len().is_multiple_of(2);
        let devices = if is_cut {
            copies(&devices)
        } else {
            drop(fs);
            devices
        };
        Ok(Self { devices, model, manners, next })
    }

    /// A copy of the devices.
    pub(super) fn copies(&self) -> Vec<Arc<MemoryDevice>> {
        copies(&self.devices)
    }

    /// Runs the steps on the model, except those with the indexes `refused`. Returns their history.
    pub(super) fn history(self, workload: &Workload, refused: &[usize]) -> Result<History, String> {
        history(&self.model, self.next, &workload.steps, refused, self.manners)
    }

    /// Runs the steps on `fs`. Before an operation begins, calls `begin` with the moment after it.
    /// After a promise was made, calls `kept` with its index. Returns the indexes of the steps that
    /// were refused and are allowed to be.
    ///
    /// # Errors
    /// The first step that fails, by its index.
    pub(super) fn run(
        &self,
        fs: &OpenedVolume,
        workload: &Workload,
        begin: &mut dyn FnMut(usize),
        kept: &mut dyn FnMut(usize),
    ) -> Result<Vec<usize>, (usize, offshoot_vfs::Error)> {
        let mut runner = fs.runner(self.next);
        let (mut moment, mut promise, mut refused) = (0, 0, Vec::new());
        for (place, step) in workload.steps.iter().enumerate() {
            if step.is_change() {
                begin(moment + 1);
            }
            match runner.run_step(step) {
                Ok(()) if step.is_change() => moment += 1,
                Ok(()) => {
                    kept(promise);
                    promise += 1;
                }
                // A refused operation is no moment: the next operation gets its number.
                Err(error) if step.may_be_refused(&error) => refused.push(place),
                Err(error) => return Err((place, error)),
            }
        }
        Ok(refused)
    }
}

/// Runs `steps` on the model, except those with the indexes `refused`. `next` is the number of the
/// next operation.
pub(super) fn history(
    model: &Model,
    next: u32,
    steps: &[WorkloadStep],
    refused: &[usize],
    manners: EngineManners,
) -> Result<History, String> {
    let mut runner = Runner::new(model, next).with_subvolumes(model);
    let mut heads = HashSet::new();
    let mut take = || -> Result<Picture, String> {
        let mut now =
            picture::take(model, model, manners).map_err(|e| format!("the model: {e}"))?;
        now.share_heads(&mut heads);
        Ok(now)
    };
    let (mut pictures, mut promises) = (vec![take()?], Vec::new());
    for (place, step) in steps.iter().enumerate() {
        let (of, is_subvolume) = match step {
            _ if refused.contains(&place) => {
                runner.skip();
                continue;
            }
            WorkloadStep::Do(op) | WorkloadStep::Try(op) => {
                runner.run(op).map_err(|e| format!("the model refuses {op}: {e}"))?;
                pictures.push(take()?);
                continue;
            }
            WorkloadStep::Fsync(path) | WorkloadStep::Fdatasync(path) => synced(model, path)?,
            WorkloadStep::Sync => (None, false),
        };
        let has_times = !matches!(step, WorkloadStep::Fdatasync(_));
        promises.push(DurablePromise { moment: pictures.len() - 1, of, is_subvolume, has_times });
    }
    let moves = steps.iter().any(|step| step.op().is_some_and(WorkloadOp::moves_data));
    Ok(History::new(pictures, promises, manners, moves))
}

/// The file at a path, and whether it is the root of a subvolume other than the top-level one.
fn synced(model: &Model, path: &str) -> Result<(Option<PictureId>, bool), String> {
    let file = find(model, path)
        .and_then(|file| Ok((picture::id_of(model, model, file)?, model.is_subvolume(file))));
    let (id, is_subvolume) = file.map_err(|e| format!("the model has no {path}: {e}"))?;
    Ok((Some(id), is_subvolume && id != ROOT))
}

/// Copies of devices as they are now: what a cut leaves that loses no write.
pub(super) fn copies(devices: &[Arc<MemoryDevice>]) -> Vec<Arc<MemoryDevice>> {
    devices.iter().map(|device| Arc::new(device.snapshot())).collect()
}

pub(super) fn as_devices(devices: &[Arc<MemoryDevice>]) -> MemberDevices {
    devices.iter().map(|device| device.clone() as Arc<dyn BlockDevice>).collect()
}

impl Recorded {
    /// Runs the whole workload on a copy of the volume `image`. If there is a `strike`, that
    /// request fails; the engine has to survive the failure, and to report that it did.
    pub(super) fn new(
        engine: &dyn TestedEngine,
        image: &[Arc<dyn BlockDevice>],
        workload: &Workload,
        strike: Option<FailingRequest>,
    ) -> Result<Self, String> {
        let ready = ReadyVolume::new(engine, image, workload)?;
        let set = CrashDevice::set(as_devices(&ready.devices));
        let set: Vec<Arc<CrashDevice>> = set.into_iter().map(Arc::new).collect();
        let faulty = |device: &Arc<CrashDevice>| Arc::new(FaultDevice::new(device.clone()));
        let faulty: Vec<_> = set.iter().map(faulty).collect();
        if let Some(FailingRequest { member, requests, number }) = strike {
            faulty[member].strike(requests, number, Fault::Error);
        }
        let devices = faulty.iter().map(|device| device.clone() as Arc<dyn BlockDevice>).collect();
        let fs = engine.open_writable(devices).map_err(|e| e.to_string())?;
        let mark = |what: &str, number: usize| set[0].mark(&format!("{what} {number}"));
        let outcome =
            ready.run(&fs, workload, &mut |moment| mark("begin", moment), &mut |promise| {
                mark("kept", promise);
            });
        let refused = outcome.map_err(|(place, e)| format!("{}: {e}", workload.steps[place]))?;
        let shown = fs.picture(engine.manners()).map_err(|e| format!("before any cut: {e}"))?;
        let survived = fs.survived.load(Ordering::Relaxed);
        drop(fs);
        let counts = |device: &Arc<FaultDevice>| {
            [RequestKind::Writes, RequestKind::Flushes].map(|requests| device.count(requests))
        };
        let requests: Vec<_> = faulty.iter().map(counts).collect();
        if let Some(FailingRequest { member, requests, number }) = strike
            && faulty[member].count(requests) > number
            && survived == 0
        {
            return Err("no step reported the failure".into());
        }
        let history = ready.history(workload, &refused)?;
        let shown = shown.without_space();
        let model = history.pictures.last().map(Picture::without_space);
        if model.as_ref() != Some(&shown) {
            return Err(format!("before any cut: ours {shown:?}\nthe model {model:?}"));
        }
        Ok(Self { history, log: set[0].log(), requests })
    }
}

impl WorkloadProgress {
    /// How far the workload had come, given all cuts that could have left this state. A promise
    /// counts if it was made before the latest of these cuts, because the state must be right for
    /// that cut too. An operation counts as begun if it began before the earliest cut, because all
    /// data in the state was written before that.
    pub(super) fn of(state: &CrashState) -> Self {
        let numbers = |marks: &[Arc<str>], what: &str| -> Vec<usize> {
            let numbers = marks.iter().filter_map(|mark| mark.strip_prefix(what));
            numbers.map(|number| number.trim().parse().expect("a mark of our own")).collect()
        };
        let begun = numbers(&state.marks()[..state.marks_before_earliest_cut()], "begin");
        let kept = numbers(state.marks(), "kept");
        Self { kept, latest: begun.last().copied().unwrap_or(0) }
    }
}
