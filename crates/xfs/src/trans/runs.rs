//! Where a buffer lies on the device: in one run, or in several, as a directory block of several
//! blocks of the filesystem may.

use std::ops::Deref;

use offshoot_xfs_format::BasicBlock;

use crate::buffer::DiskRun;

/// The runs of a buffer, at least one. The place of the first one names the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BufferRuns {
    One([DiskRun; 1]),
    Several(Box<[DiskRun]>),
}

impl From<DiskRun> for BufferRuns {
    fn from(run: DiskRun) -> Self {
        Self::One([run])
    }
}

impl From<Vec<DiskRun>> for BufferRuns {
    fn from(runs: Vec<DiskRun>) -> Self {
        match runs[..] {
            [run] => Self::One([run]),
            _ => Self::Several(runs.into()),
        }
    }
}

impl Deref for BufferRuns {
    type Target = [DiskRun];

    fn deref(&self) -> &[DiskRun] {
        match self {
            Self::One(run) => run,
            Self::Several(runs) => runs,
        }
    }
}

impl BufferRuns {
    /// Where the buffer begins.
    pub(crate) fn at(&self) -> BasicBlock {
        self.first().map_or(BasicBlock(0), |run| run.at)
    }

    /// The bytes of all runs.
    pub(crate) fn bytes(&self) -> usize {
        self.iter().map(|run| run.bytes).sum()
    }
}
