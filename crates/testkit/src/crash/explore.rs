//! Explores all states of a workload, and many workloads in parallel.

mod states;

use std::ops::AddAssign;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_device::{BlockDevice, CrashPlan, MemoryDevice, RequestKind};
use offshoot_vfs::{EntryPlace, Errno, NewFile, Result, Timestamp};

use super::picture::{Picture, PictureId, ROOT};
use super::record::{FailingRequest, Recorded, as_devices, copies};
use super::{OpenedVolume, TestedEngine, Workload};
use states::WorkloadStates;

/// The owner of the file that `change` makes in every state. No workload has that many operations,
/// so none makes a file with this owner.
const AFTERWARDS: u32 = u32::MAX;

/// An outside judge of a state, such as `btrfs check`. It returns what is wrong as an error.
pub type StateJudge<'a> =
    dyn Fn(&[Arc<MemoryDevice>]) -> std::result::Result<(), String> + Sync + 'a;

/// How states are explored.
pub struct StateExplorer<'a> {
    /// The engine that opens the states.
    pub engine: &'a dyn TestedEngine,
    /// The members of an empty volume, on which every workload starts.
    pub image: Vec<Arc<dyn BlockDevice>>,
    /// Which states of a log are built. No write is torn if the workload writes data in place and
    /// the engine does so only then.
    pub plan: CrashPlan,
    /// The outside judge, and how often it is asked: with 10 it judges every tenth different state.
    pub judge: Option<(&'a StateJudge<'a>, usize)>,
}

/// The counts of an exploration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExplorationCounts {
    /// Workloads that were run.
    pub workloads: usize,
    /// States that were compared with the promises.
    pub states: usize,
    /// States with different contents. Each was opened, checked and changed.
    pub different: usize,
    /// States that the outside judge saw.
    pub judged: usize,
}

impl AddAssign for ExplorationCounts {
    fn add_assign(&mut self, other: Self) {
        self.workloads += other.workloads;
        self.states += other.states;
        self.different += other.different;
        self.judged += other.judged;
    }
}

impl std::fmt::Display for ExplorationCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { workloads, states, different, judged } = self;
        write!(
            f,
            "{workloads} workloads, {states} states, {different} of them different, \
             {judged} judged from outside"
        )
    }
}

impl StateExplorer<'_> {
    /// Explores all of `workloads`, on all processors. A single workload is explored by all of
    /// them together.
    ///
    /// # Panics
    /// When a state breaks a promise. The message names the workloads, the states and what is
    /// wrong.
    pub fn explore_all(
        &self,
        mut workloads: impl Iterator<Item = Workload> + Send,
    ) -> ExplorationCounts {
        /// After this many failures, the explorer starts no further workload.
        const ENOUGH: usize = 5;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let first = [workloads.next(), workloads.next()];
        let threads = if first[1].is_some() { 1 } else { processors };
        let workloads = Mutex::new(first.into_iter().flatten().chain(workloads));
        let (tally, failures) = (Mutex::new(ExplorationCounts::default()), Mutex::new(Vec::new()));
        let entered = AtomicUsize::new(0);
        let next = || {
            let failed = lock(&failures).len();
            if failed < ENOUGH { lock(&workloads).next() } else { None }
        };
        std::thread::scope(|scope| {
            for _ in 0..processors / threads {
                scope.spawn(|| {
                    while let Some(workload) = next() {
                        match self.explore_counted(&workload, &entered, threads) {
                            Ok(one) => *lock(&tally) += one,
                            Err(problem) => lock(&failures).push(format!("{workload}: {problem}")),
                        }
                    }
                });
            }
        });
        let failures = lock(&failures);
        assert!(failures.is_empty(), "{}", failures.join("\n\n"));
        *lock(&tally)
    }

    /// Explores all states of one workload.
    ///
    /// # Errors
    /// The first state that breaks a promise.
    pub fn explore(&self, workload: &Workload) -> std::result::Result<ExplorationCounts, String> {
        self.explore_counted(workload, &AtomicUsize::new(0), 1)
    }

    /// Explores all states of one workload during which one request to a member fails. Each failure
    /// is a run of its own: every `every`-th write and every flush of each member fails once. The
    /// engine has to survive each of them.
    ///
    /// # Errors
    /// The first failure that the engine does not survive, or the first state that breaks a
    /// promise.
    pub fn explore_failing(
        &self,
        workload: &Workload,
        every: usize,
    ) -> std::result::Result<ExplorationCounts, String> {
        let sound = Recorded::new(self.engine, &self.image, workload, None)?;
        let (mut tally, entered) = (ExplorationCounts::default(), AtomicUsize::new(0));
        for (member, counts) in sound.requests.iter().enumerate() {
            let kinds = [(RequestKind::Writes, every), (RequestKind::Flushes, 1)];
            for ((requests, every), count) in kinds.into_iter().zip(counts) {
                // Start at another request on each member, so that the members differ in which ones
                // fail.
                for number in (member as u64 % every as u64..*count).step_by(every) {
                    let strike = FailingRequest { member, requests, number };
                    let recorded = Recorded::new(self.engine, &self.image, workload, Some(strike));
                    let explored = recorded.and_then(|one| {
                        WorkloadStates::new(self, workload, one, &entered).explore(1)
                    });
                    tally += explored.map_err(|e| format!("with {strike:?}: {e}"))?;
                }
            }
        }
        Ok(tally)
    }

    fn explore_counted(
        &self,
        workload: &Workload,
        entered: &AtomicUsize,
        threads: usize,
    ) -> std::result::Result<ExplorationCounts, String> {
        let recorded = Recorded::new(self.engine, &self.image, workload, None)?;
        WorkloadStates::new(self, workload, recorded, entered).explore(threads)
    }
}

/// Opens a volume after a cut or a fault, changes it, ends it (by another cut if `is_cut_again`),
/// and opens it again. Returns what it showed when it was opened first.
pub(super) fn enter(
    engine: &dyn TestedEngine,
    devices: &[Arc<MemoryDevice>],
    is_cut_again: bool,
) -> std::result::Result<Picture, String> {
    let manners = engine.manners();
    let failed = |what: &'static str| move |e| format!("{what}: {e}");
    engine.check(as_devices(devices)).map_err(failed("the check"))?;
    let fs = engine.open_writable(as_devices(devices)).map_err(failed("opening"))?;
    let found = fs.picture(manners).map_err(failed("reading"))?;
    let removed = change(&fs, &found).map_err(failed("changing it"))?;
    let left = if is_cut_again { copies(devices) } else { devices.to_vec() };
    drop(fs);
    engine.check(as_devices(&left)).map_err(failed("the check after a change"))?;
    let fs = engine.open(as_devices(&left)).map_err(failed("opening again"))?;
    let mut again = fs.picture(manners).map_err(failed("reading again"))?;
    let afterwards = PictureId::from(AFTERWARDS);
    let is_there = again.files.remove(&afterwards).is_some_and(|file| file.size == 5000);
    again.names.retain(|_, to| *to != afterwards);
    // The new file changed the size and the times of the root.
    again.files.insert(ROOT, found.files[&ROOT].clone());
    let mut expected = found.clone();
    for id in removed {
        expected.files.remove(&id);
        expected.names.retain(|_, to| *to != id);
    }
    if is_there && again == expected {
        Ok(found)
    } else {
        Err(format!("after a change there is {again:?}\nand before it {found:?}"))
    }
}

/// Drops what deleted subvolumes hold, makes a file with data, and syncs. If there is no room,
/// removes files from the root until there is. Returns the removed files.
fn change(fs: &OpenedVolume, found: &Picture) -> Result<Vec<PictureId>> {
    fs.subvolumes.drop_deleted()?;
    let at = Timestamp { secs: 1_700_000_000, nanos: 0 };
    let new = NewFile { permissions: 0o600, uid: AFTERWARDS, gid: 0, umask: None, at };
    let place = EntryPlace { dir: fs.root(), name: b"afterwards" };
    let make = || {
        let file = fs.lookup(place.dir, place.name).or_else(|_| fs.create(place, &new))?;
        fs.write(file, 0, &[7; 5000], at)
    };
    let mut names = found.names.iter().filter(|(name, id)| found.is_only_in_root(name, **id));
    let mut removed = Vec::new();
    while let Err(error) = make() {
        let next = (error.errno() == Errno::NOSPC).then(|| names.next()).flatten();
        let Some(((_, name), id)) = next else { return Err(error) };
        fs.unlink(EntryPlace { dir: fs.root(), name }, at)?;
        removed.push(*id);
    }
    fs.sync()?;
    Ok(removed)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
