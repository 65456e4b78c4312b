//! What a workload promised, when somebody else did it: the kernel, or an engine that does several
//! at once.

use offshoot_vfs::{Attr, FileSystem};

use super::oracle::{History, Whose};
use super::picture;
use super::record::history;
use super::workload::{Runner, Workload};
use crate::model::Model;
use crate::model::subvolumes::Subvolumes;

/// The promises of a whole workload, to judge by what is there of it.
///
/// Whoever does the workload numbers its operations as a [`Runner`] does that begins with 1, has
/// what an operation makes owned by its number, and makes the set-up durable before the steps.
#[derive(Debug)]
pub struct Promised {
    history: History,
    /// Whether the operations have the times of a [`Runner`].
    has_times: bool,
}

impl Promised {
    /// Those of `workload`, done below a directory like `root` that is empty.
    ///
    /// # Errors
    /// What the model refuses of it.
    pub fn by(workload: &Workload, root: &Attr) -> Result<Self, String> {
        let model = Model::new(root);
        let mut runner = Runner::new(&model, 1).with_subvolumes(&model);
        for op in &workload.setup {
            runner.run(op).map_err(|e| format!("the model refuses {op}: {e}"))?;
        }
        let next = runner.next();
        let history = history(&model, next, &workload.steps, &[])?;
        Ok(Self { history, has_times: true })
    }

    /// The same of the kernel, which has a clock of its own, and promises less where a file has a
    /// name in a directory that is synced and another elsewhere.
    #[must_use]
    pub fn of_the_kernel(mut self) -> Self {
        self.history.forget_times();
        self.history.whose = Whose::Kernels;
        Self { has_times: false, ..self }
    }

    /// What is wrong with what `fs` shows when all steps were done.
    ///
    /// # Errors
    /// What cannot be read.
    pub fn judge(
        &self,
        fs: &dyn FileSystem,
        subvolumes: &dyn Subvolumes,
    ) -> Result<Vec<String>, String> {
        let mut found = picture::take(fs, subvolumes).map_err(|e| e.to_string())?;
        if !self.has_times {
            found.forget_times();
        }
        let History { pictures, promises, .. } = &self.history;
        let kept: Vec<_> = (0..promises.len()).collect();
        Ok(self.history.judge(&found, &kept, pictures.len() - 1))
    }
}
