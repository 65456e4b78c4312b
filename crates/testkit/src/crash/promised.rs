//! What a workload promised when another party ran it: the kernel, or an engine that runs several
//! operations at once.

use offshoot_vfs::{Attr, FileSystem};

use super::manners::EngineManners;
use super::oracle::{History, PromiseMaker};
use super::picture;
use super::record::history;
use super::workload::{Runner, Workload};
use crate::model::Model;
use crate::model::subvolumes::SubvolumeCalls;

/// The promises of a whole workload, by which a volume is judged afterwards.
///
/// The party that runs the workload has three duties: it numbers the operations as a [`Runner`]
/// that begins with 1 does, gives each new file its operation's number as the owner, and makes the
/// set-up durable before the steps.
#[derive(Debug)]
pub struct Promised {
    history: History,
    /// Whether the times of the files are those that a [`Runner`] sets.
    has_times: bool,
}

impl Promised {
    /// The promises of `workload`, run below an empty directory like `root`.
    ///
    /// # Errors
    /// The operation that the model refuses.
    pub fn by(workload: &Workload, root: &Attr) -> Result<Self, String> {
        Self::with_manners(workload, root, EngineManners::default())
    }

    /// The same promises of an engine with these manners.
    ///
    /// # Errors
    /// The operation that the model refuses.
    pub fn with_manners(
        workload: &Workload,
        root: &Attr,
        manners: EngineManners,
    ) -> Result<Self, String> {
        let model = Model::new(root).with_manners(manners.model);
        let mut runner = Runner::new(&model, 1).with_subvolumes(&model);
        for op in &workload.setup {
            runner.run(op).map_err(|e| format!("the model refuses {op}: {e}"))?;
        }
        let next = runner.next();
        let history = history(&model, next, &workload.steps, &[], manners)?;
        Ok(Self { history, has_times: true })
    }

    /// The same promises for the kernel. It has a clock of its own, and it promises less about a
    /// file that has one name in a synced directory and another one elsewhere.
    #[must_use]
    pub fn of_the_kernel(mut self) -> Self {
        self.history.forget_times();
        self.history.whose = PromiseMaker::Kernels;
        Self { has_times: false, ..self }
    }

    /// Lists the broken promises in what `fs` shows after all steps.
    ///
    /// # Errors
    /// The first part of `fs` that cannot be read.
    pub fn judge(
        &self,
        fs: &dyn FileSystem,
        subvolumes: &dyn SubvolumeCalls,
    ) -> Result<Vec<String>, String> {
        let mut found =
            picture::take(fs, subvolumes, self.history.manners).map_err(|e| e.to_string())?;
        if !self.has_times {
            found.forget_times();
        }
        let History { pictures, promises, .. } = &self.history;
        let kept: Vec<_> = (0..promises.len()).collect();
        Ok(self.history.judge(&found, &kept, pictures.len() - 1))
    }
}
