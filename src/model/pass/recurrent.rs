//! Rows of a long prompt in a layer whose state goes from row to row: ranks gather the maps of their rows, so that all rows of
//! a rank are taken as those of an answer are, and what stays is the state at two borders.

use super::prompt::{PromptOutput, PromptRows};
use super::{Finishing, Pass, micro_blocks};
use crate::model::decoder::Projected;
use crate::model::delta::GatedDelta;
use crate::runtime::units::LayerIndex;

impl Pass<'_> {
    /// [`Pass::prompt`] where a state goes from row to row.
    pub(super) fn recurrent_prompt(&self, rule: &GatedDelta, layer: LayerIndex, rows: &PromptRows) -> PromptOutput {
        let blocks = micro_blocks(&rows.layout.span(), &self.cp_group, self.micro_block);
        let Projected { input, handed } = self.project_all(layer, &blocks, rows.x_pw);
        let (out, borders) = rule.prompt(&self.cp_group, rows.layout, &input);
        drop(input);
        for (index, border) in (0..).zip(&borders) {
            for (plane, part) in rows.borders.iter().zip(border.tensors()) {
                plane.get(index).copy_(part);
            }
        }
        let y_pw = rows.x_pw.empty_like();
        let held = rows.hold(&y_pw);
        let mut finishing = Finishing::new(self, layer, None);
        for micro in &blocks {
            finishing.rows(micro, rows.x_pw, &micro.rows_of(&out), &micro.planes_of(&handed), &y_pw);
        }
        PromptOutput { y_pw, held, index: None, experts: finishing.end() }
    }
}
