//! Explores the states of one workload, with several threads if no other workload needs them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use offshoot_device::{CrashPlan, CrashState, CrashStates, MemoryDevice};

use super::{ExplorationCounts, StateExplorer, enter, lock};
use crate::crash::Workload;
use crate::crash::oracle::History;
use crate::crash::picture::Picture;
use crate::crash::record::{Recorded, WorkloadProgress};

/// The number of states that are remembered. Equal states are near each other: each commit makes
/// the states that follow different from all before.
const MOST_KNOWN: usize = 2000;

/// What a state showed when it was opened, or why it is broken.
type EnteredState = Arc<OnceLock<Result<Picture, String>>>;

/// The states of a workload while they are explored.
pub(super) struct WorkloadStates<'e> {
    explorer: &'e StateExplorer<'e>,
    workload: &'e Workload,
    history: History,
    states: Mutex<CrashStates>,
    known: Mutex<KnownStates>,
    /// How many different states of all workloads were entered.
    entered: &'e AtomicUsize,
    tally: Mutex<ExplorationCounts>,
    /// The first state that breaks a promise, of those looked at: its number, and what is wrong.
    problem: Mutex<Option<(usize, String)>>,
}

/// The last states with different contents.
#[derive(Default)]
struct KnownStates {
    by_hash: HashMap<u64, EnteredState>,
    in_order: VecDeque<u64>,
    heads: HashSet<Arc<[u8]>>,
}

impl<'e> WorkloadStates<'e> {
    pub(super) fn new(
        explorer: &'e StateExplorer<'e>,
        workload: &'e Workload,
        Recorded { history, log, .. }: Recorded,
        entered: &'e AtomicUsize,
    ) -> Self {
        let engine = explorer.engine;
        let bears_torn = engine.manners().is_overwriting || !workload.writes_in_place();
        let plan = CrashPlan { tears: explorer.plan.tears && bears_torn, ..explorer.plan };
        let states = log.states_torn_where(&plan, &|offset, data| engine.bears_torn(offset, data));
        let states = Mutex::new(states);
        let tally = ExplorationCounts { workloads: 1, ..ExplorationCounts::default() };
        let (known, tally, problem) = (Mutex::default(), Mutex::new(tally), Mutex::default());
        Self { explorer, workload, history, states, known, entered, tally, problem }
    }

    /// Explores all states with so many threads.
    ///
    /// # Errors
    /// A state that breaks a promise.
    pub(super) fn explore(self, threads: usize) -> Result<ExplorationCounts, String> {
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|| self.explore_some());
            }
            self.explore_some();
        });
        match lock(&self.problem).take() {
            Some((_, problem)) => Err(problem),
            None => Ok(*lock(&self.tally)),
        }
    }

    fn explore_some(&self) {
        while let Some(state) = self.next() {
            let (number, looked) = match state {
                Ok(state) => (state.number, self.look_at(state)),
                Err(error) => (usize::MAX, Err(error.to_string())),
            };
            if let Err(problem) = looked {
                let mut first = lock(&self.problem);
                if first.as_ref().is_none_or(|(known, _)| number < *known) {
                    *first = Some((number, problem));
                }
            }
        }
    }

    fn next(&self) -> Option<io::Result<CrashState>> {
        let is_broken = lock(&self.problem).is_some();
        if is_broken { None } else { lock(&self.states).next() }
    }

    /// Opens a state and judges what it shows.
    fn look_at(&self, state: CrashState) -> Result<(), String> {
        let what = format!("state {} ({})", state.number, state.description);
        let WorkloadProgress { kept, latest } = WorkloadProgress::of(&state);
        let devices = state.devices;
        let known = lock(&self.known).state(hash(&devices));
        let (mut is_new, mut is_judged) = (false, false);
        // Another thread with the same state waits here.
        let found = known.get_or_init(|| {
            is_new = true;
            self.enter(devices, &mut is_judged)
        });
        let problems = match found {
            Ok(found) => self.history.judge(found, &kept, latest),
            Err(problem) => return Err(format!("{what}: {problem}")),
        };
        *lock(&self.tally) += ExplorationCounts {
            states: 1,
            different: usize::from(is_new),
            judged: usize::from(is_judged),
            ..ExplorationCounts::default()
        };
        if problems.is_empty() {
            return Ok(());
        }
        let problems = problems.join("\n  ");
        Err(format!("{what}, promises {kept:?}, moment {latest} at the latest:\n  {problems}"))
    }

    /// Opens a state and changes it. An outside judge, if it is its turn, looks at it first.
    /// Returns what the state showed when it was opened.
    fn enter(&self, devices: Vec<MemoryDevice>, is_judged: &mut bool) -> Result<Picture, String> {
        let number = self.entered.fetch_add(1, Ordering::Relaxed);
        // A cut may leave two mirrors of in-place data that differ. A reader may get either one, so
        // the judge and the engine may see different data.
        let has_one_view = devices.len() == 1 || !self.workload.writes_in_place();
        let devices: Vec<_> = devices.into_iter().map(Arc::new).collect();
        if let Some((judge, every)) = self.explorer.judge
            && has_one_view
            && number.is_multiple_of(every)
        {
            *is_judged = true;
            judge(&devices)?;
        }
        let engine = self.explorer.engine;
        let is_cut_again = engine.manners().ends_with_writes && !number.is_multiple_of(2);
        let mut found = enter(engine, &devices, is_cut_again)?;
        if found.corrupt() > 0 {
            return Err("there is corrupt data".into());
        }
        found.share_heads(&mut lock(&self.known).heads);
        Ok(found)
    }
}

impl KnownStates {
    /// The state with this hash, which may be new.
    fn state(&mut self, hash: u64) -> EnteredState {
        if let Some(known) = self.by_hash.get(&hash) {
            return known.clone();
        }
        if self.in_order.len() == MOST_KNOWN
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.by_hash.remove(&oldest);
        }
        self.in_order.push_back(hash);
        self.by_hash.entry(hash).or_default().clone()
    }
}

fn hash(devices: &[MemoryDevice]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for device in devices {
        device.hash_changes(&mut hasher);
        hasher.write_u8(0);
    }
    hasher.finish()
}
